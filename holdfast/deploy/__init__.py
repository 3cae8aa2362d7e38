"""The second world: the same experiment on Flower, with real clients. Nothing outside this folder imports flwr."""
