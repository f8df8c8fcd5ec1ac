"""Services of share groups: leasing, acknowledging and receiving records, and the groups' offsets."""
