// Operators of the simulated accelerator: those of the CPU, run by the thread of a stream.
#include "runtime.h"

#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <unordered_set>

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// `value` with every tensor in it, and every simulated device, replaced.
IValue replaced(
    const IValue& value,
    const std::function<at::Tensor(const at::Tensor&)>& tensor,
    c10::DeviceType device) {
  if (value.isTensor()) return tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(tensor(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each.has_value() ? std::optional(tensor(*each)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kSim) return c10::Device(device);
  return value;
}

Stack replaced(
    const Stack& values,
    const std::function<at::Tensor(const at::Tensor&)>& tensor,
    c10::DeviceType device) {
  Stack result;
  for (const IValue& value : values) result.push_back(replaced(value, tensor, device));
  return result;
}

at::Tensor with_number(at::Tensor fresh, const at::Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    fresh.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return fresh;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (is_here(tensor)) return with_number(host_view(tensor), tensor);
  return with_number(tensor.clone(), tensor);  // read now, as the argument of a launch is
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty_as(const at::Tensor& meta, c10::DeviceIndex device) {
  if (!meta.defined()) return meta;
  auto options = meta.options().device(c10::Device(kSim, device));
  return at::empty_strided(meta.sizes(), meta.strides(), options);
}

std::optional<c10::DeviceIndex> device_of(const Stack& arguments) {
  std::optional<c10::DeviceIndex> found;
  for (const IValue& value : arguments) {
    replaced(
        value,
        [&](const at::Tensor& tensor) {
          if (is_here(tensor) && !found.has_value()) found = tensor.device().index();
          return tensor;
        },
        c10::kCPU);
    if (!found.has_value() && value.isDevice() && value.toDevice().type() == kSim) {
      const auto index = value.toDevice().index();
      found = index < 0 ? current_device() : index;
    }
  }
  return found;
}

void copy_results(const Stack& from, const Stack& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i].isTensor() && to[i].toTensor().defined()) {
      const at::Tensor &result = from[i].toTensor(), target = to[i].toTensor();
      TORCH_CHECK(result.sizes() == target.sizes(), "a meta kernel has told other sizes");
      target.copy_(result);
    } else if (to[i].isTensorList()) {
      const auto results = from[i].toTensorVector(), targets = to[i].toTensorVector();
      for (size_t j = 0; j < targets.size(); ++j) targets[j].copy_(results[j]);
    }
  }
}

// What the operator would return, of its shapes alone. Nothing where only the values tell.
std::optional<Stack> on_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  static std::mutex mutex;
  static auto* without = new std::unordered_set<c10::OperatorName>();
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (without->count(op.operator_name())) return std::nullopt;
  }
  Stack stack = replaced(
      arguments, [](const at::Tensor& tensor) { return on_meta(tensor); }, c10::kMeta);
  try {
    op.callBoxed(&stack);
    return stack;
  } catch (const c10::NotImplementedError&) {
    std::lock_guard<std::mutex> lock(mutex);
    without->insert(op.operator_name());
    return std::nullopt;
  } catch (const std::exception&) {  // a kernel in Python, or a mistake of which the CPU will tell
    return std::nullopt;
  }
}

// The argument that return `i` of `schema` is, if it is one.
std::optional<IValue> written(
    const c10::FunctionSchema& schema, size_t i, const Stack& arguments) {
  const auto* shared = schema.returns()[i].alias_info();
  if (shared == nullptr) return std::nullopt;
  TORCH_CHECK(
      shared->isWrite(), schema.name(), " is a view, which the simulated device does not know");
  for (size_t j = 0; j < arguments.size(); ++j) {
    const auto* of = schema.arguments()[j].alias_info();
    if (of != nullptr && of->beforeSets() == shared->beforeSets()) return arguments[j];
  }
  return std::nullopt;
}

bool is_empty(const IValue& value) { return value.isTensor() && value.toTensor().numel() == 0; }

void fit(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.sizes() != like.sizes()) tensor.resize_(like.sizes());
}

void launch(c10::DeviceIndex device, const std::string& name, Task task) {
  count(device, Counted::Launch, name);
  enqueue(current_stream(device), std::move(task));
}

void wait_for_values(c10::DeviceIndex device, const std::string& why) {
  count(device, Counted::Synchronisation, why);
  wait_on_host(mark(current_stream(device)), device);
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.operator_name().name;
  const Stack arguments(stack->end() - schema.arguments().size(), stack->end());
  const auto found = device_of(arguments);
  TORCH_CHECK(found.has_value(), name, " has no tensor on a simulated device");
  const c10::DeviceGuard guard(c10::Device(kSim, *found));
  at::AutoDispatchBelowADInplaceOrView no_autograd;

  // Where results go: into arguments that are written to, or into new memory, whose size a kernel
  // without values tells. Where none can, or a number is returned, the host waits.
  Stack returned, fresh;
  std::optional<Stack> meta;
  bool is_known = true;
  for (size_t i = 0; i < schema.returns().size() && is_known; ++i) {
    const std::optional<IValue> argument = written(schema, i, arguments);
    if (!argument.has_value() || is_empty(*argument)) {
      if (!meta.has_value()) meta = on_meta(op, arguments);
      is_known = meta.has_value() && ((*meta)[i].isTensor() || (*meta)[i].isTensorList());
      if (!is_known) break;
    }
    if (argument.has_value()) {
      if (is_empty(*argument)) fit(argument->toTensor(), (*meta)[i].toTensor());
      returned.push_back(*argument);
      fresh.emplace_back();
      continue;
    }
    returned.push_back(replaced(
        (*meta)[i], [&](const at::Tensor& each) { return empty_as(each, *found); }, kSim));
    fresh.push_back(replaced(
        returned.back(),
        [](const at::Tensor& each) { return each.defined() ? host_view(each) : each; },
        c10::kCPU));
  }
  Stack cpu = replaced(
      arguments,
      [&](const at::Tensor& tensor) {
        // What is empty may grow, where the host waits for it.
        const bool grows = !is_known && is_here(tensor) && tensor.numel() == 0;
        return grows ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU))
                     : on_cpu(tensor);
      },
      c10::kCPU);
  torch::jit::drop(*stack, schema.arguments().size());
  if (is_known) {
    launch(*found, name, [op, cpu, fresh]() mutable {
      op.callBoxed(&cpu);
      copy_results(cpu, fresh);
    });
    for (IValue& each : returned) stack->push_back(std::move(each));
    return;
  }
  wait_for_values(*found, name);
  op.callBoxed(&cpu);
  for (size_t i = 0; i < cpu.size(); ++i) {
    const std::optional<IValue> argument = written(schema, i, arguments);
    const auto moved = [&](const at::Tensor& result) {
      if (!result.defined()) return result;
      const bool grown = argument.has_value() && is_empty(*argument);
      at::Tensor to = grown ? argument->toTensor() : empty_as(result, *found);
      if (grown) fit(to, result);
      launch(*found, name, [to = host_view(to), result] { to.copy_(result); });
      return to;
    };
    const bool stays = argument.has_value() && !is_empty(*argument);
    stack->push_back(stays ? *argument : replaced(cpu[i], moved, c10::kCPU));
  }
}

// ------------------------------------------------------------- operators of memory and of views

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceIndex device = (is_here(from) ? from : to).device().index();
  const c10::DeviceGuard guard(c10::Device(kSim, device));
  if (is_here(from) && is_here(to)) {
    if (from.device() != to.device()) wait_for_values(device, "copy to another device");
    const c10::DeviceGuard at_target(to.device());
    launch(to.device().index(), "copy_", [a = host_view(from), b = host_view(to)] { b.copy_(a); });
  } else if (is_here(from)) {
    if (non_blocking && to.is_pinned()) {
      launch(device, "copy to pinned", [a = host_view(from), b = to.detach()] { b.copy_(a); });
    } else {
      wait_for_values(device, "copy to host");
      to.detach().copy_(host_view(from));
    }
  } else if (non_blocking && from.is_pinned()) {
    launch(device, "copy from pinned", [a = from.detach(), b = host_view(to)] { b.copy_(a); });
  } else {
    launch(device, "copy_", [a = from.detach(), b = host_view(to)] { b.copy_(a); });
    wait_for_values(device, "copy from pageable memory");
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  wait_for_values(self.device().index(), "item");
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_source);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
  // Of other devices torch makes these of smaller ones, with other roundings.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace
}  // namespace sim
