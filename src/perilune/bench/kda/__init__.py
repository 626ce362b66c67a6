"""KDA on a GPU: ours, the torch path and two public implementations, checked and then timed on the same inputs."""
