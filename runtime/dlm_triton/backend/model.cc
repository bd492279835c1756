#include "model.h"

#include <sys/stat.h>

#include <cstdlib>
#include <string_view>

#include "base/json.h"

namespace dlm::triton {
namespace {

constexpr size_t kMostConfigBytes = 16 << 20;
constexpr size_t kMostKept = 64;       // compiled constraints
constexpr double kCompileSeconds = 5;  // processor time for each constraint
constexpr char kEngineLibrary[] = "libonnxruntime.so";

bool is_file(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode);
}

// The configuration of a model, as Triton completed it.
class Config {
 public:
  explicit Config(TRITONBACKEND_Model* model) {
    TRITONSERVER_Message* message = nullptr;
    check(TRITONBACKEND_ModelConfig(model, 1, &message));
    const std::unique_ptr<TRITONSERVER_Message, void (*)(TRITONSERVER_Message*)> held(
        message, [](TRITONSERVER_Message* it) { log_error(TRITONSERVER_MessageDelete(it)); });
    const char* text = nullptr;
    size_t size = 0;
    check(TRITONSERVER_MessageSerializeToJson(message, &text, &size));
    root_ = json::parse(std::string_view(text, size), kMostConfigBytes);
  }

  bool is_decoupled() const {
    const json::Value* const policy = root_->find("model_transaction_policy");
    return policy != nullptr && policy->boolean("decoupled");
  }

  // Returns the value of a parameter of config.pbtxt. If the file does not set the parameter,
  // returns `absent`.
  std::string setting(const char* name, const char* absent) const {
    const json::Value* const parameters = root_->find("parameters");
    const json::Value* const found = parameters != nullptr ? parameters->find(name) : nullptr;
    return found != nullptr ? found->string("string_value") : absent;
  }

  int32_t number(const char* name, int32_t absent) const {
    const std::string text = setting(name, std::to_string(absent).c_str());
    char* end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0')
      fail(DLM_INVALID_ARGUMENT, "config.pbtxt: parameter %s = %s is not a whole number", name,
           json::quoted(text).c_str());
    check_range(name, value, 0, 1 << 20);
    return static_cast<int32_t>(value);
  }

 private:
  std::unique_ptr<const json::Value> root_;
};

}  // namespace

Model::Model(TRITONBACKEND_Model* model) {
  const char* name = nullptr;
  check(TRITONBACKEND_ModelName(model, &name));
  name_ = name;
  uint64_t version = 0;
  check(TRITONBACKEND_ModelVersion(model, &version));
  version_ = std::to_string(version);
  TRITONBACKEND_ArtifactType type = TRITONBACKEND_ARTIFACT_FILESYSTEM;
  const char* location = nullptr;
  check(TRITONBACKEND_ModelRepository(model, &type, &location));
  const std::string folder = std::string(location) + "/" + version_;

  const Config config(model);
  is_decoupled_ = config.is_decoupled();
  max_running_ = config.number("max_running", max_running_);
  max_waiting_ = config.number("max_waiting", max_waiting_);

  const std::string engine = config.setting("engine", "auto");
  const std::string given = config.setting("provider", "cpu");
  const std::string provider = given.substr(0, given.find(':'));
  const std::string library = folder + "/" + kEngineLibrary;
  dlm_open_options options;
  dlm_open_options_init(&options, sizeof options);
  options.engine = engine.c_str();
  options.provider = provider.c_str();
  if (provider.size() < given.size()) {
    const std::string number = given.substr(provider.size() + 1);
    if (number.empty() || number.size() > 4 ||
        number.find_first_not_of("0123456789") != std::string::npos)
      fail(DLM_INVALID_ARGUMENT,
           "config.pbtxt: parameter provider = %s: give a name such as cuda, or a name and the "
           "number of a GPU such as cuda:1",
           json::quoted(given).c_str());
    options.device = std::atoi(number.c_str());
  }
  options.threads = config.number("threads", 0);
  options.allow_fallback = config.number("allow_fallback", 0);
  if (is_file(library)) options.engine_library = library.c_str();
  char message[1024] = "";
  dlm_bundle* bundle = nullptr;
  const dlm_status status =
      dlm_bundle_open((folder + "/bundle").c_str(), &options, message, sizeof message, &bundle);
  if (status != DLM_OK) throw Error(status, message);
  bundle_.reset(bundle);
  const dlm_text* text = nullptr;
  has_text_ = dlm_bundle_text(bundle, message, sizeof message, &text) == DLM_OK;
  read_layout();
}

void Model::read_layout() {
  const std::string_view manifest = dlm_bundle_describe(bundle())->manifest;
  const auto root = json::parse(manifest, manifest.size());
  const json::Value* const layout = root->find("json_layout");
  if (layout == nullptr || layout->string() == "compact") return;
  if (layout->string() == "spaced") {
    item_separator_ = ", ";
    key_separator_ = ": ";
  } else if (layout->string() == "indented") {
    key_separator_ = ": ";
    indent_ = 2;
  } else if (layout->string() == "lines") {
    has_lines_ = 1;
  } else {
    layout->refuse("is not a layout that this backend knows");
  }
}

std::shared_ptr<dlm_automaton> Model::find_constraint(const Asked& asked) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto each = kept_.begin(); each != kept_.end(); ++each) {
    if (each->kind != asked.constraint_kind || each->content != asked.constraint) continue;
    kept_.splice(kept_.begin(), kept_, each);
    return each->automaton;
  }
  return nullptr;
}

std::shared_ptr<dlm_automaton> Model::compile_constraint(const Asked& asked) {
  if (auto found = find_constraint(asked)) return found;
  dlm_constraint constraint;
  dlm_constraint_init(&constraint, sizeof constraint);
  constraint.kind = asked.constraint_kind;
  constraint.content = asked.constraint.data();
  constraint.content_size = asked.constraint.size();
  constraint.item_separator = item_separator_.c_str();
  constraint.key_separator = key_separator_.c_str();
  constraint.indent = indent_;
  constraint.has_lines = has_lines_;
  constraint.seconds = kCompileSeconds;
  char message[1024] = "";
  dlm_automaton* made = nullptr;
  const dlm_status status =
      dlm_automaton_compile(bundle(), &constraint, message, sizeof message, &made);
  if (status != DLM_OK) throw Error(status, message);
  const std::shared_ptr<dlm_automaton> automaton(made, Destroy());
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_front({asked.constraint_kind, asked.constraint, automaton});
  if (kept_.size() > kMostKept) kept_.pop_back();
  return automaton;
}

}  // namespace dlm::triton
