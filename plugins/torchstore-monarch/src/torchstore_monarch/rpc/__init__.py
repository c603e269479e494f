"""The transport ``monarch-rpc``: bytes in endpoint calls, from agent to agent."""
