"""Files on disks that several hosts and users share: atomic writes, staging, locks, and reading what others wrote."""
