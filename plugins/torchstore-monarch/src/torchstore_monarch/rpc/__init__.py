"""The transport ``monarch-rpc``: bytes travel in endpoint calls, from agent to agent."""
