// An Iceberg REST catalog for tests: Iceberg's own implementation of the server's side (CatalogHandlers, RESTSerializers),
// over its JDBC catalog in a SQLite file, behind the HTTP server of the JDK. Iceberg publishes no server that runs by itself.
//
// java -cp JARS IcebergRestServer.java DIRECTORY: prints its address, and ends with its standard input.

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Map;
import java.util.concurrent.Executors;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.catalog.Namespace;
import org.apache.iceberg.catalog.TableIdentifier;
import org.apache.iceberg.exceptions.AlreadyExistsException;
import org.apache.iceberg.exceptions.CommitFailedException;
import org.apache.iceberg.exceptions.NoSuchNamespaceException;
import org.apache.iceberg.exceptions.NoSuchTableException;
import org.apache.iceberg.exceptions.ValidationException;
import org.apache.iceberg.jdbc.JdbcCatalog;
import org.apache.iceberg.rest.CatalogHandlers;
import org.apache.iceberg.rest.RESTCatalogProperties.SnapshotMode;
import org.apache.iceberg.rest.RESTSerializers;
import org.apache.iceberg.rest.requests.CreateNamespaceRequest;
import org.apache.iceberg.rest.requests.CreateTableRequest;
import org.apache.iceberg.rest.requests.UpdateNamespacePropertiesRequest;
import org.apache.iceberg.rest.requests.UpdateTableRequest;
import org.apache.iceberg.rest.responses.ConfigResponse;
import org.apache.iceberg.rest.responses.ErrorResponse;
import org.apache.iceberg.shaded.com.fasterxml.jackson.annotation.JsonAutoDetect;
import org.apache.iceberg.shaded.com.fasterxml.jackson.annotation.PropertyAccessor;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.DeserializationFeature;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.PropertyNamingStrategies;

public final class IcebergRestServer {
  private static final int THREADS = 8;
  private static final ObjectMapper JSON = new ObjectMapper();

  private final JdbcCatalog catalog = new JdbcCatalog();

  private IcebergRestServer(String directory) {
    catalog.setConf(new Configuration());
    catalog.initialize(
        "server",
        Map.of(
            "uri", "jdbc:sqlite:" + directory + "/catalog.db",
            "warehouse", "file://" + directory + "/warehouse",
            "clients", "1",
            "jdbc.schema-version", "V1"));
  }

  public static void main(String[] arguments) throws IOException {
    JSON.setVisibility(PropertyAccessor.FIELD, JsonAutoDetect.Visibility.ANY);
    JSON.configure(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES, false);
    JSON.setPropertyNamingStrategy(PropertyNamingStrategies.KEBAB_CASE);
    RESTSerializers.registerAll(JSON);
    IcebergRestServer served = new IcebergRestServer(arguments[0]);
    HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
    server.setExecutor(Executors.newFixedThreadPool(THREADS));
    server.createContext("/v1/", served::respond);
    server.start();
    System.out.println("http://127.0.0.1:" + server.getAddress().getPort());
    System.out.flush();
    while (System.in.read() >= 0) {}
    System.exit(0);
  }

  private void respond(HttpExchange exchange) throws IOException {
    int status = 200;
    Object answer;
    try {
      answer = answer(exchange);
    } catch (Exception error) {
      status = status(error);
      if (status == 500) {
        error.printStackTrace();
      }
      answer =
          ErrorResponse.builder()
              .responseCode(status)
              .withType(error.getClass().getSimpleName())
              .withMessage(String.valueOf(error.getMessage()))
              .build();
    }
    byte[] body = answer == null ? new byte[0] : JSON.writeValueAsBytes(answer);
    exchange.getResponseHeaders().set("Content-Type", "application/json");
    if (body.length == 0 || exchange.getRequestMethod().equals("HEAD")) {
      exchange.sendResponseHeaders(status == 200 ? 204 : status, -1);
    } else {
      exchange.sendResponseHeaders(status, body.length);
      exchange.getResponseBody().write(body);
    }
    exchange.close();
  }

  /** What a request comes to; null for a response without a body. */
  private Object answer(HttpExchange exchange) throws IOException {
    String[] path = exchange.getRequestURI().getRawPath().substring("/v1/".length()).split("/");
    for (int index = 0; index < path.length; index++) {
      path[index] = URLDecoder.decode(path[index], StandardCharsets.UTF_8);
    }
    String parts = path[0] + (path.length > 2 ? "/" + path[2] : "") + ":" + path.length;
    Namespace namespace = path.length > 1 ? Namespace.of(path[1].split("\u001f")) : Namespace.empty();
    TableIdentifier table = path.length > 3 ? TableIdentifier.of(namespace, path[3]) : null;
    switch (exchange.getRequestMethod() + " " + parts) {
      case "GET config:1":
        return ConfigResponse.builder().build();
      case "GET namespaces:1":
        return CatalogHandlers.listNamespaces(catalog, namespace);
      case "POST namespaces:1":
        return CatalogHandlers.createNamespace(catalog, read(exchange, CreateNamespaceRequest.class));
      case "HEAD namespaces:2":
        CatalogHandlers.namespaceExists(catalog, namespace);
        return null;
      case "GET namespaces:2":
        return CatalogHandlers.loadNamespace(catalog, namespace);
      case "POST namespaces/properties:3":
        return CatalogHandlers.updateNamespaceProperties(
            catalog, namespace, read(exchange, UpdateNamespacePropertiesRequest.class));
      case "GET namespaces/tables:3":
        return CatalogHandlers.listTables(catalog, namespace);
      case "POST namespaces/tables:3":
        CreateTableRequest created = read(exchange, CreateTableRequest.class);
        return created.stageCreate()
            ? CatalogHandlers.stageTableCreate(catalog, namespace, created)
            : CatalogHandlers.createTable(catalog, namespace, created);
      case "HEAD namespaces/tables:4":
        CatalogHandlers.tableExists(catalog, table);
        return null;
      case "GET namespaces/tables:4":
        return CatalogHandlers.loadTable(catalog, table, SnapshotMode.ALL);
      case "POST namespaces/tables:4":
        return CatalogHandlers.updateTable(catalog, table, read(exchange, UpdateTableRequest.class));
      case "DELETE namespaces/tables:4":
        CatalogHandlers.dropTable(catalog, table);
        return null;
      case "POST namespaces/tables:5": // reports of scans and commits
        return null;
      default:
        throw new UnsupportedOperationException(exchange.getRequestMethod() + " " + Arrays.toString(path));
    }
  }

  private static <T> T read(HttpExchange exchange, Class<T> kind) throws IOException {
    return JSON.readValue(exchange.getRequestBody(), kind);
  }

  private static int status(Exception error) {
    if (error instanceof NoSuchTableException || error instanceof NoSuchNamespaceException) {
      return 404;
    } else if (error instanceof AlreadyExistsException || error instanceof CommitFailedException) {
      return 409;
    } else if (error instanceof ValidationException || error instanceof IllegalArgumentException) {
      return 400;
    } else if (error instanceof UnsupportedOperationException) {
      return 406;
    }
    return 500;
  }
}
