"""One run on several ranks: who has which tokens and parameters, what is summed, how it is saved."""
