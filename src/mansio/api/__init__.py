"""The other doors: everything that is not the Kafka protocol. They only translate; the broker's service
does the work.
"""
