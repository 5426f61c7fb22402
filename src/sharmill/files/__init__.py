"""Files on disks that several hosts and users share: atomic writes, staging, locks, and reading untrusted files."""
