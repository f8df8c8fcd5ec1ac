import java.time.Duration;
import java.util.Arrays;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;

/**
 * Counts words with exactly_once_v2, until it is killed: lines of a topic, words by a repartition topic, counts in a
 * store with a changelog topic, each new count to another topic.
 *
 * <p>Arguments: the topic of lines, the topic of counts, then settings of Kafka Streams as name=value.
 */
public final class JavaWordCount {
  public static void main(String[] arguments) throws Exception {
    Properties settings = new Properties();
    settings.put("processing.guarantee", "exactly_once_v2");
    settings.put("default.key.serde", Serdes.StringSerde.class.getName());
    settings.put("default.value.serde", Serdes.StringSerde.class.getName());
    settings.put("statestore.cache.max.bytes", "0"); // each word gives a new count
    for (int index = 2; index < arguments.length; index++) {
      String[] setting = arguments[index].split("=", 2);
      settings.put(setting[0], setting[1]);
    }
    StreamsBuilder builder = new StreamsBuilder();
    builder.<String, String>stream(arguments[0])
        .flatMapValues(line -> Arrays.asList(line.split(" ")))
        .groupBy((key, word) -> word, Grouped.with("words", Serdes.String(), Serdes.String()))
        .count(Materialized.as("counts"))
        .toStream()
        .mapValues(count -> Long.toString(count))
        .to(arguments[1], Produced.with(Serdes.String(), Serdes.String()));
    KafkaStreams streams = new KafkaStreams(builder.build(), settings);
    CountDownLatch over = new CountDownLatch(1);
    streams.setUncaughtExceptionHandler(
        error -> {
          error.printStackTrace();
          return StreamThreadExceptionResponse.REPLACE_THREAD;
        });
    streams.setStateListener(
        (now, before) -> {
          System.out.println(now);
          if (now == KafkaStreams.State.ERROR) {
            over.countDown();
          }
        });
    Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(30))));
    streams.start();
    over.await();
    Runtime.getRuntime().halt(1);
  }
}
