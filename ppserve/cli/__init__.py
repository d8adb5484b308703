"""The command line: flags become one frozen config, config becomes rooms. Never a decision about requests."""
