"""What can go wrong around a run: damage, kills, signals, full disks, hostile files, and what must hold then."""
