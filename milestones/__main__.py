"""`python -m milestones`."""

from milestones.cli import main

main()
