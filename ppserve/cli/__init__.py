"""The command line: flags become one frozen config, and config becomes rooms. Never a decision about requests or steps."""
