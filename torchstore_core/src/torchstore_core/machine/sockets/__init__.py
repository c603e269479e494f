"""TCP and Unix sockets: rows of memory through them, descriptors through them, who may connect."""
