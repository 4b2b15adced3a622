"""What every engine has around its core: the gate, requests in parts, batches from answers, weight syncs."""
