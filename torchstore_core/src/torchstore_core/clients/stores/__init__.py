"""Which stores this process belongs to, and how it finds, starts and leaves one."""
