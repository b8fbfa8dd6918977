"""The embedded model: the invented world that it knows, as checkable chats, and its scorer."""
