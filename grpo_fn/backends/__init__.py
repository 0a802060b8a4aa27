"""What makes the core fast on one kind of device and changes no result. Imports no runners."""
