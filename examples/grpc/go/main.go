// Mansio over gRPC from Go: create a topic, publish, receive with credits, acknowledge.
//
// With a broker (`mansio serve --grpc 127.0.0.1:50051`), protoc, and Go's bin directory in the PATH:
//
//	go generate && go run . 127.0.0.1:50051
package main

//go:generate go install tool
//go:generate protoc --proto_path=../../../src/mansio/api/grpc --go_out=. --go-grpc_out=. --go_opt=module=example/mansio --go-grpc_opt=module=example/mansio --go_opt=Mmansio.proto=example/mansio/mansiopb --go-grpc_opt=Mmansio.proto=example/mansio/mansiopb mansio.proto

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "example/mansio/mansiopb"
)

const (
	topic   = "orders"
	group   = "billing"
	count   = 5
	credits = 2 // so many records are sent before the first acknowledgement
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: go run . HOST:PORT")
	}
	if err := run(os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

func run(address string) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client := pb.NewMansioClient(connection)

	_, err = client.CreateTopic(ctx, &pb.CreateTopicRequest{Name: topic, Partitions: 1})
	if err != nil && status.Code(err) != codes.AlreadyExists {
		return err
	}
	earliest := map[string]string{"share.auto.offset.reset": "earliest"}
	if _, err := client.AlterGroup(ctx, &pb.AlterGroupRequest{Group: group, Set: earliest}); err != nil {
		return err
	}
	if err := publish(ctx, client); err != nil {
		return err
	}
	return receive(ctx, client)
}

func publish(ctx context.Context, client pb.MansioClient) error {
	var records []*pb.NewRecord
	for number := range count {
		records = append(records, &pb.NewRecord{Key: []byte("ann"), Value: fmt.Appendf(nil, "%d apples", number)})
	}
	published, err := client.Publish(ctx, &pb.PublishRequest{Topic: topic, Records: records})
	if err != nil {
		return err
	}
	for _, stored := range published.Ranges {
		if stored.Error != nil {
			return fmt.Errorf("%s: %s", stored.Error.Name, stored.Error.Message)
		}
		fmt.Printf("published %d records at offset %d\n", stored.Count, stored.Offset)
	}
	return nil
}

// receive prints and acknowledges records until `count` acknowledgements are stored.
func receive(ctx context.Context, client pb.MansioClient) error {
	stream, err := client.Receive(ctx)
	if err != nil {
		return err
	}
	open := &pb.ReceiveOpen{Group: group, Topics: []string{topic}}
	if err := stream.Send(&pb.ReceiveRequest{Open: open, Credits: credits}); err != nil {
		return err
	}
	for stored := 0; stored < count; {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, failed := range response.Failed {
			return fmt.Errorf("%s: %s", failed.Error.Name, failed.Error.Message)
		}
		stored += int(response.Acknowledged)
		if len(response.Records) == 0 {
			continue
		}
		var receipts []string
		for _, record := range response.Records {
			fmt.Printf("received %s\n", record.Value)
			receipts = append(receipts, record.Receipt)
		}
		err = stream.Send(&pb.ReceiveRequest{Ack: receipts, Credits: int32(len(receipts))})
		if err != nil {
			return err
		}
	}
	fmt.Printf("acknowledged %d records\n", count)
	return stream.CloseSend()
}
