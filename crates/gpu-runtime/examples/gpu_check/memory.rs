//! Copies and room.

use anyhow::Result;
use gpu_runtime::GpuError;
use rand::RngExt;

use crate::{Bench, spread};

const GIB: usize = 1 << 30;

pub(crate) fn bandwidth(bench: &mut Bench) -> Result<()> {
    let n = GIB / 8;
    let values: Vec<u64> = (0..n).map(|_| bench.rng.random()).collect();
    let mut from = bench.gpu.alloc::<u64>(n)?;
    let mut to = bench.gpu.alloc::<u64>(n)?;
    bench.stream.upload(&values, &mut from)?;
    bench.stream.fill_bytes(&mut to, 0xff)?;
    let times = bench.device_ms(20, || Ok(bench.stream.copy(&from, &mut to)?))?;
    let is_same = bench.stream.download(&to)? == values;
    bench.check("copy of 1 GiB on the device", is_same, spread(&times, "ms"));
    let rate = 2.0 * GIB as f32 / (times[10] * 1e-3) / 1e12;
    bench.tell("  bytes read and written", format!("{rate:.3} TB/s"));
    Ok(())
}

pub(crate) fn latency(bench: &mut Bench) -> Result<()> {
    let n = 4096 / 4;
    let values: Vec<u32> = (0..n).map(|_| bench.rng.random()).collect();
    let mut up = bench.gpu.pinned::<u32>(n)?;
    let mut down = bench.gpu.pinned::<u32>(n)?;
    up.copy_from_slice(&values);
    let mut device = bench.gpu.alloc::<u32>(n)?;
    let to_device = bench.wall_us(200, || {
        // SAFETY: the stream is waited for before the memory is used again.
        unsafe { bench.stream.upload_async(&up, 0, &mut device)? };
        Ok(bench.stream.synchronize()?)
    })?;
    let to_host = bench.wall_us(200, || {
        // SAFETY: the stream is waited for before the memory is used again.
        unsafe { bench.stream.download_async(&device, &mut down, 0)? };
        Ok(bench.stream.synchronize()?)
    })?;
    let is_same = *down == *values;
    bench.check("4 KiB, pinned to device and waited for", is_same, spread(&to_device, "us"));
    bench.tell("4 KiB, device to pinned and waited for", spread(&to_host, "us"));
    let pageable = bench.wall_us(200, || {
        bench.stream.download(&device)?;
        Ok(())
    })?;
    bench.tell("4 KiB, device to pageable", spread(&pageable, "us"));
    Ok(())
}

pub(crate) fn room(bench: &mut Bench) -> Result<()> {
    let before = bench.gpu.memory()?;
    let asked = 2 * before.total;
    let error = bench.gpu.alloc::<u8>(asked).err();
    let is_told = matches!(
        error,
        Some(GpuError::OutOfMemory { requested, total, .. })
            if requested == asked && total == before.total
    );
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    bench.check("twice the memory is refused", is_told, text);
    for _ in 0..3 {
        let buffer = bench.gpu.alloc_zeroed::<u8>(8 * GIB)?;
        drop(buffer);
    }
    let after = bench.gpu.memory()?;
    let is_back = before.free.abs_diff(after.free) < 64 << 20;
    let text = format!("{} bytes free before, {} after", before.free, after.free);
    bench.check("3 times 8 GiB come back", is_back, text);
    Ok(())
}
