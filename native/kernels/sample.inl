#pragma once
namespace {
static void fill_sample(headrace::KernelTable&) {}
}  // namespace
