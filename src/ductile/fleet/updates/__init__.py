"""A version of the weights on its way to servers, as a transaction."""
