"""What only FedCPA's figures show."""
