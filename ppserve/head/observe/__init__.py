"""What people and Prometheus see of the engine. Never a decision: nothing here changes what is computed."""
