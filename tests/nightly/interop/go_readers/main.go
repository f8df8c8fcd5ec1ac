// Prints the values of a topic up to a given value, reads on for a second, and commits what it read.
//
// Arguments: sarama or franz-go, bootstrap servers, topic, group, the last value.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kgo"
)

const readOn = time.Second

func main() {
	client, servers, topic, group, last := os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5]
	var err error
	switch client {
	case "sarama":
		err = readWithSarama(servers, topic, group, last)
	case "franz-go":
		err = readWithFranz(servers, topic, group, last)
	default:
		err = fmt.Errorf("unknown client %s", client)
	}
	if err != nil {
		log.Fatal(err)
	}
}

type saramaReader struct {
	last   string
	cancel context.CancelFunc
}

func (saramaReader) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (saramaReader) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (reader saramaReader) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case message, open := <-claim.Messages():
			if !open {
				return nil
			}
			fmt.Println(string(message.Value))
			session.MarkMessage(message, "")
			if string(message.Value) == reader.last {
				time.AfterFunc(readOn, reader.cancel)
			}
		case <-session.Context().Done():
			session.Commit()
			return nil
		}
	}
}

func readWithSarama(servers, topic, group, last string) error {
	config := sarama.NewConfig()
	config.Version = sarama.V3_0_0_0
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	consumers, err := sarama.NewConsumerGroup([]string{servers}, group, config)
	if err != nil {
		return err
	}
	defer consumers.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for ctx.Err() == nil {
		if err := consumers.Consume(ctx, []string{topic}, saramaReader{last, cancel}); err != nil {
			return err
		}
	}
	return nil
}

func readWithFranz(servers, topic, group, last string) error {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(servers),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for ctx.Err() == nil {
		fetches := client.PollFetches(ctx)
		fetches.EachRecord(func(record *kgo.Record) {
			fmt.Println(string(record.Value))
			if string(record.Value) == last {
				time.AfterFunc(readOn, cancel)
			}
		})
	}
	return client.CommitUncommittedOffsets(context.Background())
}
