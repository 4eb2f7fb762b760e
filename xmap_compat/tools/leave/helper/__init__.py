"""The file that ``leave`` writes beside edited modules, as a real module."""
