"""What clients ask and hear, in values of `core`; one folder for each protocol. Never a scheduling decision."""
