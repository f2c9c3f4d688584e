"""What the machine, the engines and the requests are doing: one poller, frozen snapshots, history."""
