"""The ways that a weight update's buckets take from a rank to a server: `ductile.messages.updates.WeightCarrier`.

`ductile.weights.sender.WeightSender` is the rank's end of all of them; `ductile.weights.receiver.receive` the server's.
"""
