"""What people see of a job and of a machine: everything here reads, and changes nothing."""
