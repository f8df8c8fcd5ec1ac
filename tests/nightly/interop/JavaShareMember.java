import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * A member of a share group that does what it is told line by line, and answers each line with one line.
 *
 * <p>Arguments: a topic, then settings of the client as name=value.
 *
 * <pre>
 * poll MS                     the records of one poll: partition:offset:deliveries:value ...
 * PARTITION OFFSET TYPE       acknowledge one of them
 * commit                      partition=error ... of what was acknowledged, "-" for none
 * lock                        how long leases last, as the broker said
 * close
 * </pre>
 */
public final class JavaShareMember {
  public static void main(String[] arguments) throws Exception {
    String topic = arguments[0];
    Properties settings = new Properties();
    for (int index = 1; index < arguments.length; index++) {
      String[] setting = arguments[index].split("=", 2);
      settings.put(setting[0], setting[1]);
    }
    StringDeserializer strings = new StringDeserializer();
    Map<String, ConsumerRecord<String, String>> had = new HashMap<>();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    try (KafkaShareConsumer<String, String> consumer = new KafkaShareConsumer<>(settings, strings, strings)) {
      consumer.subscribe(List.of(topic));
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        String[] words = line.split(" ");
        if (words[0].equals("close")) {
          break;
        }
        System.out.println(answer(consumer, had, words));
      }
    }
    System.out.println("closed");
  }

  private static String answer(
      KafkaShareConsumer<String, String> consumer, Map<String, ConsumerRecord<String, String>> had, String[] words) {
    StringBuilder said = new StringBuilder();
    try {
      switch (words[0]) {
        case "poll":
          for (ConsumerRecord<String, String> one : consumer.poll(Duration.ofMillis(Long.parseLong(words[1])))) {
            had.put(one.partition() + " " + one.offset(), one);
            said.append(one.partition()).append(':').append(one.offset()).append(':');
            said.append(one.deliveryCount().orElse((short) -1)).append(':').append(one.value()).append(' ');
          }
          break;
        case "commit":
          consumer.commitSync(Duration.ofSeconds(20)).forEach((partition, error) -> {
            said.append(partition.partition()).append('=');
            said.append(error.map(one -> one.getClass().getSimpleName()).orElse("-")).append(' ');
          });
          break;
        case "lock":
          said.append(consumer.acquisitionLockTimeoutMs().orElse(-1));
          break;
        default:
          consumer.acknowledge(had.get(words[0] + " " + words[1]), AcknowledgeType.valueOf(words[2]));
      }
    } catch (RuntimeException error) {
      return "error " + error;
    }
    return "ok " + said.toString().trim();
  }
}
