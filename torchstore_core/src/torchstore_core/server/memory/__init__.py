"""Where values lie: segments, placement, leases, and volumes that are gone."""
