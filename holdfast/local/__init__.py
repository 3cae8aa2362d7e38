"""What happens on a client: the training loop, its losses, and the plans by which a stack of clients is
trained."""
