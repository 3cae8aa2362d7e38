"""What only FedCAP's figures show."""
