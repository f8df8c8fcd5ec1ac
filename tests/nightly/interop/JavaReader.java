import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * Prints the values of a topic up to a given value, reads on to the end of the partition, and commits its position.
 *
 * <p>Arguments: bootstrap servers, topic, group, the last value.
 */
public final class JavaReader {
  public static void main(String[] arguments) {
    Properties settings = new Properties();
    settings.put("bootstrap.servers", arguments[0]);
    settings.put("group.id", arguments[2]);
    settings.put("auto.offset.reset", "earliest");
    settings.put("enable.auto.commit", "false");
    StringDeserializer strings = new StringDeserializer();
    TopicPartition partition = new TopicPartition(arguments[1], 0);
    try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings, strings, strings)) {
      consumer.subscribe(List.of(arguments[1]));
      boolean last = false;
      long end = -1;
      while (!last || consumer.position(partition) < end) {
        for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(500))) {
          System.out.println(record.value());
          last = last || record.value().equals(arguments[3]);
        }
        if (last && end < 0) {
          Map<TopicPartition, Long> ends = consumer.endOffsets(List.of(partition));
          end = ends.get(partition);
        }
      }
      consumer.commitSync();
    }
  }
}
