"""Creates a queue, sends to it, receives and deletes; the oldest tested boto3 runs it."""

import sys

import boto3

endpoint, name = sys.argv[1:]
credentials = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
sqs = boto3.client("sqs", endpoint_url=endpoint, **credentials)
url = sqs.create_queue(QueueName=name)["QueueUrl"]
for number in range(10):
    sqs.send_message(QueueUrl=url, MessageBody=f"value {number}", DelaySeconds=number % 2)

values: set[str] = set()
while len(values) < 10:
    received = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=20)
    for message in received["Messages"]:
        values.add(message["Body"])
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
assert values == {f"value {number}" for number in range(10)}, values
