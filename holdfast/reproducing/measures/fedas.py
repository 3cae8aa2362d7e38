"""What only FedAS's figures show."""
