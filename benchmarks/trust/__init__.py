"""What a server does when things go wrong: engines that are killed, clients that leave, bodies that are too large."""
