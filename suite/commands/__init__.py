"""What the commands of `suite` do, behind the thin command line."""
