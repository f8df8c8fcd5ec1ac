import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.PartitionInfo;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Transactional producers and their consumers, which do what they are told line by line; each line has one line for an
 * answer: "ok ..." or "error CLASS: MESSAGE".
 *
 * <p>Arguments: settings of all clients as name=value.
 *
 * <pre>
 * producer NAME name=value ...          open one with these settings, and initTransactions
 * consumer NAME TOPIC name=value ...    open one and subscribe
 * begin | flush | commit | abort NAME   what the producer has under these names
 * send NAME TOPIC PARTITION VALUE ...   without waiting
 * offsets NAME CONSUMER                 sendOffsetsToTransaction with the positions of a consumer
 * poll CONSUMER COUNT                   values, until there are so many
 * committed CONSUMER                    partition:offset ... of what it is assigned, -1 for none
 * read TOPIC ISOLATION FROM BYTES       partition:offset:value ... to the end, in fetches of so many bytes
 * describe TRANSACTIONAL_ID             state:epoch
 * close NAME                            a producer or a consumer
 * </pre>
 */
public final class JavaTransactions {
  private static final Duration LIMIT = Duration.ofSeconds(60);
  private static final StringSerializer TO_BYTES = new StringSerializer();
  private static final StringDeserializer TO_TEXT = new StringDeserializer();

  private final Properties common;
  private final Map<String, KafkaProducer<String, String>> producers = new HashMap<>();
  private final Map<String, KafkaConsumer<String, String>> consumers = new HashMap<>();

  private JavaTransactions(Properties common) {
    this.common = common;
  }

  public static void main(String[] arguments) throws Exception {
    JavaTransactions program = new JavaTransactions(settings(new Properties(), List.of(arguments)));
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      String answer;
      try {
        answer = ("ok " + program.answer(line.split(" "))).trim();
      } catch (Exception error) {
        answer = "error " + error.getClass().getSimpleName() + ": " + error.getMessage();
      }
      System.out.println(answer.replace('\n', ' '));
    }
    Runtime.getRuntime().halt(0);
  }

  private static Properties settings(Properties common, List<String> told) {
    Properties settings = new Properties();
    settings.putAll(common);
    for (String each : told) {
      String[] setting = each.split("=", 2);
      settings.put(setting[0], setting[1]);
    }
    return settings;
  }

  private String answer(String[] words) throws Exception {
    List<String> rest = Arrays.asList(words).subList(1, words.length);
    KafkaProducer<String, String> producer = producers.get(rest.get(0));
    switch (words[0]) {
      case "producer":
        producer = new KafkaProducer<>(settings(common, rest.subList(1, rest.size())), TO_BYTES, TO_BYTES);
        producers.put(rest.get(0), producer);
        producer.initTransactions();
        return "";
      case "consumer":
        KafkaConsumer<String, String> made =
            new KafkaConsumer<>(settings(common, rest.subList(2, rest.size())), TO_TEXT, TO_TEXT);
        made.subscribe(List.of(rest.get(1)));
        consumers.put(rest.get(0), made);
        return "";
      case "begin":
        producer.beginTransaction();
        return "";
      case "flush":
        producer.flush();
        return "";
      case "commit":
        producer.commitTransaction();
        return "";
      case "abort":
        producer.abortTransaction();
        return "";
      case "send":
        for (String value : rest.subList(3, rest.size())) {
          producer.send(new ProducerRecord<>(rest.get(1), Integer.valueOf(rest.get(2)), null, value));
        }
        return "";
      case "offsets":
        KafkaConsumer<String, String> source = consumers.get(rest.get(1));
        producer.sendOffsetsToTransaction(positions(source), source.groupMetadata());
        return "";
      case "poll":
        return poll(consumers.get(rest.get(0)), Integer.parseInt(rest.get(1)));
      case "committed":
        return committed(consumers.get(rest.get(0)));
      case "read":
        return read(rest.get(0), rest.get(1), Long.parseLong(rest.get(2)), rest.get(3));
      case "describe":
        return describe(rest.get(0));
      case "close":
        if (producer != null) {
          producers.remove(rest.get(0)).close(LIMIT);
        } else {
          consumers.remove(rest.get(0)).close();
        }
        return "";
      default:
        throw new IllegalArgumentException(words[0]);
    }
  }


  private static Map<TopicPartition, OffsetAndMetadata> positions(KafkaConsumer<String, String> consumer) {
    Map<TopicPartition, OffsetAndMetadata> found = new HashMap<>();
    for (TopicPartition each : consumer.assignment()) {
      found.put(each, new OffsetAndMetadata(consumer.position(each)));
    }
    return found;
  }

  private static String poll(KafkaConsumer<String, String> consumer, int count) {
    List<String> values = new ArrayList<>();
    long end = System.nanoTime() + LIMIT.toNanos();
    while (values.size() < count) {
      if (System.nanoTime() > end) {
        throw new IllegalStateException("only " + values);
      }
      for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofMillis(100))) {
        values.add(each.value());
      }
    }
    return String.join(" ", values);
  }

  private static String committed(KafkaConsumer<String, String> consumer) {
    TreeMap<Integer, Long> found = new TreeMap<>();
    consumer
        .committed(consumer.assignment(), LIMIT)
        .forEach((partition, offset) -> found.put(partition.partition(), offset == null ? -1 : offset.offset()));
    List<String> said = new ArrayList<>();
    found.forEach((partition, offset) -> said.add(partition + ":" + offset));
    return String.join(" ", said);
  }

  private String read(String topic, String isolation, long from, String bytes) {
    Properties settings = settings(common, List.of("isolation.level=" + isolation, "max.partition.fetch.bytes=" + bytes));
    List<ConsumerRecord<String, String>> found = new ArrayList<>();
    try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings, TO_TEXT, TO_TEXT)) {
      List<TopicPartition> partitions = new ArrayList<>();
      for (PartitionInfo each : consumer.partitionsFor(topic)) {
        partitions.add(new TopicPartition(topic, each.partition()));
      }
      consumer.assign(partitions);
      partitions.forEach(each -> consumer.seek(each, from));
      Map<TopicPartition, Long> ends = consumer.endOffsets(partitions);
      long limit = System.nanoTime() + LIMIT.toNanos();
      while (partitions.stream().anyMatch(each -> consumer.position(each) < ends.get(each))) {
        if (System.nanoTime() > limit) {
          throw new IllegalStateException("no end: " + ends);
        }
        consumer.poll(Duration.ofMillis(100)).forEach(found::add);
      }
    }
    found.sort(Comparator.<ConsumerRecord<String, String>>comparingInt(each -> each.partition()).thenComparing(each -> each.offset()));
    List<String> said = new ArrayList<>();
    found.forEach(each -> said.add(each.partition() + ":" + each.offset() + ":" + each.value()));
    return String.join(" ", said);
  }

  private String describe(String transactionalId) throws Exception {
    try (Admin admin = Admin.create(common)) {
      TransactionDescription told = admin.describeTransactions(List.of(transactionalId)).description(transactionalId).get();
      return told.state() + ":" + told.producerEpoch();
    }
  }
}
