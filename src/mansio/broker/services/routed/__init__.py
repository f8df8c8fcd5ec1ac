"""Requests that are routed to the broker that is responsible, through the own client of this one."""
