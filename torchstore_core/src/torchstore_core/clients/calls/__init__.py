"""What all calls share: deadlines, observers, checks of arguments, and event loops."""
