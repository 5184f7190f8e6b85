"""The command line: flags → config → one library call → show. Nothing else imports this package."""
