"""The only place where ranks find each other: the null universe, the groups of an epoch, their rendezvous."""
