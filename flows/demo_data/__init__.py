"""Questions and tickets of the demo; NOTICE.md says where they come from."""
