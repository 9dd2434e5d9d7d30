"""What outlives a run: its session, K and V of its texts, snapshots of them in files."""
