"""Real clients against our server: what each is told, what it asks, and that it completes. Run by `make clients`."""
