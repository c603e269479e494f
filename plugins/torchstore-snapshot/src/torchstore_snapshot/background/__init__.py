"""Takes that go on while the program does: staging in a store, and a process that writes."""
