"""What each primitive becomes on one device."""
