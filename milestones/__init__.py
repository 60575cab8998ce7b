"""The course: one folder a milestone (manifest, hints, wrong answers) and the tool that runs it. See README.md."""
