#include "metrics.h"

#include "response.h"

namespace dlm::triton {

Metric::Metric(TRITONSERVER_MetricKind kind, const char* name, const char* description,
               const std::string& model, const std::string& version, const std::string& instance) {
  TRITONSERVER_Error* error = TRITONSERVER_MetricFamilyNew(&family_, kind, name, description);
  if (error != nullptr) {
    family_ = nullptr;
    TRITONSERVER_ErrorDelete(error);
    return;
  }
  const auto label = [](const char* key, const std::string& value) {
    return TRITONSERVER_ParameterNew(key, TRITONSERVER_PARAMETER_STRING, value.c_str());
  };
  TRITONSERVER_Parameter* const labels[] = {label("model", model), label("version", version),
                                            label("instance", instance)};
  error = TRITONSERVER_MetricNew(&metric_, family_,
                                 const_cast<const TRITONSERVER_Parameter**>(labels), 3);
  for (TRITONSERVER_Parameter* each : labels) TRITONSERVER_ParameterDelete(each);
  if (error == nullptr) return;
  metric_ = nullptr;
  log_error(error);
}

Metric::~Metric() {
  if (metric_ != nullptr) log_error(TRITONSERVER_MetricDelete(metric_));
  if (family_ != nullptr) log_error(TRITONSERVER_MetricFamilyDelete(family_));
}

void Metric::set(double value) {
  if (metric_ != nullptr) log_error(TRITONSERVER_MetricSet(metric_, value));
}

void Metric::add(double value) {
  if (metric_ != nullptr) log_error(TRITONSERVER_MetricIncrement(metric_, value));
}

Metrics::Metrics(const std::string& model, const std::string& version, const std::string& instance)
    : running_(TRITONSERVER_METRIC_KIND_GAUGE, "dlm_requests_running", "Requests that run", model,
               version, instance),
      waiting_(TRITONSERVER_METRIC_KIND_GAUGE, "dlm_requests_waiting",
               "Requests that wait for the scheduler", model, version, instance),
      passes_(TRITONSERVER_METRIC_KIND_COUNTER, "dlm_passes_total", "Passes", model, version,
              instance),
      tokens_(TRITONSERVER_METRIC_KIND_COUNTER, "dlm_tokens_total", "Generated tokens", model,
              version, instance) {}

void Metrics::update(const dlm_scheduler* scheduler) {
  dlm_scheduler_stats stats;
  dlm_scheduler_get_stats(scheduler, &stats, sizeof stats);
  running_.set(stats.running);
  waiting_.set(stats.waiting);
  passes_.add(static_cast<double>(stats.passes - reported_passes_));
  reported_passes_ = stats.passes;
}

}  // namespace dlm::triton
