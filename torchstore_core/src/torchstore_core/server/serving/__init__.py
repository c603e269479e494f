"""How clients of this host are served: sockets, conversations, replies, the journal."""
