//! Opening, memory, copies, errors and dropping.

use gpu_runtime::{
    Api, DeviceChoice, Gpu, GpuError, GpuOptions, Inbox, Libraries, Memory, Outbox, elapsed_ms,
};

use crate::BOTH;
use crate::libraries::Standin;

#[test]
fn a_device_is_described_by_each_vendors_own_numbers() {
    let gpu = Standin::new(Api::Cuda).open();
    let info = gpu.info();
    assert_eq!((info.name.as_str(), info.arch.as_str()), ("Stand-in 0", "sm_90"));
    assert_eq!((info.n_multiprocessors, info.warp_size), (132, 32));
    assert_eq!((info.max_shared_per_block, info.l2_bytes), (232_448, 50 << 20));
    assert_eq!((info.total_bytes, info.driver_version), (1 << 20, 13_000));

    let gpu = Standin::new(Api::Rocm).open();
    let info = gpu.info();
    assert_eq!((info.api, info.arch.as_str()), (Api::Rocm, "gfx942"));
    assert_eq!((info.n_multiprocessors, info.warp_size), (304, 64));
    assert_eq!((info.max_shared_per_block, info.l2_bytes), (65_536, 4 << 20));
}

#[test]
fn auto_takes_what_is_there() {
    let open = |standin: &Standin| Gpu::open_with(&DeviceChoice::Auto, standin.options());
    for api in BOTH {
        let standin = Standin::new(api);
        assert_eq!(open(&standin).unwrap().unwrap().info().api, api);
        standin.set_devices(0);
        assert!(open(&standin).unwrap().is_none());
    }
    let none = GpuOptions { libraries: Libraries::only([]), kernel_cache: None };
    assert!(Gpu::open_with(&DeviceChoice::Auto, none).unwrap().is_none());
    let standin = Standin::new(Api::Cuda);
    standin.fail("cuInit", 999);
    assert!(open(&standin).unwrap().is_none());
    assert!(Gpu::open_with(&DeviceChoice::Cpu, standin.options()).unwrap().is_none());
}

#[test]
fn a_device_that_is_named_and_absent_is_one_line() {
    for (choice, api, library) in [
        (DeviceChoice::Cuda(7), Api::Cuda, "libcuda.so.1"),
        (DeviceChoice::Rocm(7), Api::Rocm, "libamdhip64.so"),
    ] {
        let none = GpuOptions { libraries: Libraries::only([]), kernel_cache: None };
        let error = Gpu::open_with(&choice, none).unwrap_err();
        assert!(matches!(error, GpuError::MissingLibrary { .. }));
        let line = error.to_string();
        assert!(line.contains(library) && line.contains("--device cpu"), "{line}");
        assert_eq!(line.lines().count(), 1);

        let standin = Standin::new(api);
        let error = Gpu::open_with(&choice, standin.options()).unwrap_err().to_string();
        assert_eq!(error, format!("there is no device {choice}: the driver has 2"));
        standin.set_devices(0);
        let error = Gpu::open_with(&choice, standin.options()).unwrap_err().to_string();
        assert!(error.ends_with("the driver has 0"), "{error}");
    }
}

#[test]
fn copies_come_back_from_any_thread() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let stream = gpu.stream().unwrap();
        let mut a = gpu.alloc::<f32>(100).unwrap();
        let mut b = gpu.alloc_zeroed::<f32>(100).unwrap();
        assert_eq!(stream.download(&b).unwrap(), [0.0; 100]);
        let values: Vec<f32> = (0..100u8).map(f32::from).collect();
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                stream.upload(&values, &mut a).unwrap();
                stream.copy(a.slice(10..20), b.slice_mut(..10)).unwrap();
                stream.fill_bytes(b.slice_mut(98..), 0xff).unwrap();
            });
            worker.join().unwrap();
        });
        let back = stream.download(&b).unwrap();
        assert_eq!(back[..10], values[10..20]);
        assert_eq!(back[10..98], [0.0; 88]);
        assert!(back[98..].iter().all(|x| x.to_bits() == u32::MAX));
        let (head, tail) = a.view_mut().split_at(99);
        assert_eq!((head.len(), tail.len()), (99, 1));
        assert_eq!(stream.download(tail.as_view()).unwrap(), [99.0]);
        assert_eq!(a.view().cast::<u8>().len(), 400);
    }
}

#[test]
fn pinned_memory_starts_at_zero_and_takes_copies_at_an_offset() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let stream = gpu.stream().unwrap();
    let mut pinned = gpu.pinned::<i32>(8).unwrap();
    assert_eq!(*pinned, [0; 8]);
    pinned.copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut buffer = gpu.alloc::<i32>(3).unwrap();
    // SAFETY: the stream is waited for before the source changes.
    unsafe { stream.upload_async(&pinned, 2, &mut buffer) }.unwrap();
    stream.synchronize().unwrap();
    // SAFETY: the stream is waited for before the target is read.
    unsafe { stream.download_async(&buffer, &mut pinned, 5) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(*pinned, [1, 2, 3, 4, 5, 3, 4, 5]);
    // SAFETY: both fail before anything is queued.
    unsafe {
        stream.upload_async(&pinned, 6, &mut buffer).unwrap_err();
        stream.download_async(&buffer, &mut pinned, usize::MAX).unwrap_err();
    }
}

#[test]
fn lengths_that_differ_are_refused() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let stream = gpu.stream().unwrap();
    let mut buffer = gpu.alloc::<u8>(4).unwrap();
    let error = stream.upload(&[1, 2, 3], &mut buffer).unwrap_err().to_string();
    assert_eq!(error, "a copy of 3 elements to 4");
    let other = gpu.alloc::<u8>(5).unwrap();
    stream.copy(&other, &mut buffer).unwrap_err();
    assert_eq!(standin.calls("cuMemcpyHtoDAsync_v2") + standin.calls("cuMemcpyDtoDAsync_v2"), 0);
    assert!(gpu.alloc::<u64>(usize::MAX / 4).unwrap_err().to_string().contains("elements"));
}

#[test]
fn nothing_is_a_size_too() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let stream = gpu.stream().unwrap();
    let mut empty = gpu.alloc_zeroed::<f32>(0).unwrap();
    stream.upload(&[], &mut empty).unwrap();
    stream.fill_bytes(&mut empty, 1).unwrap();
    assert_eq!(stream.download(&empty).unwrap(), [0.0; 0]);
    assert!(empty.is_empty());
}

#[test]
fn no_room_is_told_with_the_sizes() {
    for (api, call) in [(Api::Cuda, "cuMemAlloc_v2"), (Api::Rocm, "hipMalloc")] {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let kept = gpu.alloc::<u8>(1 << 19).unwrap();
        assert_eq!(gpu.memory().unwrap(), Memory { free: 1 << 19, total: 1 << 20 });
        let error = gpu.alloc::<f32>(1 << 18).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{call}: no room for 1048576 bytes; the device has 524288 of 1048576 bytes free"
            )
        );
        assert!(matches!(gpu.pinned::<f32>(1 << 18), Err(GpuError::OutOfMemory { .. })));
        drop(kept);
        gpu.alloc::<f32>(1 << 18).unwrap();
    }
}

#[test]
fn every_failure_has_the_call_and_the_drivers_text() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let stream = gpu.stream().unwrap();
    let mut buffer = gpu.alloc::<u8>(4).unwrap();
    standin.fail("cuStreamSynchronize", 700);
    let error = stream.upload(&[1, 2, 3, 4], &mut buffer).unwrap_err().to_string();
    assert_eq!(error, "cuStreamSynchronize failed: stand-in: bad address (code 700)");
    standin.fail("cuCtxSetCurrent", 12345);
    let error = gpu.memory().unwrap_err().to_string();
    assert_eq!(error, "cuCtxSetCurrent failed: an error without a text (code 12345)");
    for name in ["cuDevicePrimaryCtxRetain", "cuDeviceGetName", "cuDeviceGetCount"] {
        standin.fail(name, 1);
        let error = Gpu::open_with(&DeviceChoice::Cuda(1), standin.options()).unwrap_err();
        assert_eq!(error.to_string(), format!("{name} failed: stand-in: invalid value (code 1)"));
    }
}

#[test]
fn events_have_a_time_once_recorded() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let stream = gpu.stream().unwrap();
        let (start, end) = (gpu.event().unwrap(), gpu.event().unwrap());
        stream.record(&start).unwrap();
        elapsed_ms(&start, &end).unwrap_err();
        stream.record(&end).unwrap();
        assert_eq!(elapsed_ms(&start, &end).unwrap().to_bits(), 2.5f32.to_bits());
        gpu.stream().unwrap().wait(&end).unwrap();
    }
}

#[test]
fn everything_is_given_back_in_any_order() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let stream = gpu.stream().unwrap();
        let buffer = gpu.alloc::<u8>(4).unwrap();
        let pinned = gpu.pinned::<u8>(4).unwrap();
        let event = gpu.event().unwrap();
        drop(gpu);
        drop(stream);
        assert!(standin.live() >= 3);
        drop(event);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(buffer)).join().unwrap();
        });
        drop(pinned);
        assert_eq!(standin.live(), 0, "{api}");
    }
}

#[test]
fn a_drop_that_fails_does_not_panic() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let (stream, buffer) = (gpu.stream().unwrap(), gpu.alloc::<u8>(4).unwrap());
    standin.fail("cuMemFree_v2", 700);
    drop(buffer);
    standin.fail("cuCtxSetCurrent", 4);
    drop(stream);
    drop(gpu);
    assert_eq!(standin.calls("cuDevicePrimaryCtxRelease_v2"), 1);
}

#[test]
fn types_may_move_between_threads_as_documented() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<gpu_runtime::Graph>();
    send::<gpu_runtime::Blas>();
    send::<Gpu>();
    sync::<Gpu>();
    sync::<gpu_runtime::Stream>();
    sync::<gpu_runtime::Event>();
    sync::<gpu_runtime::Kernel>();
    sync::<gpu_runtime::Buffer<f32>>();
    sync::<gpu_runtime::Pinned<f32>>();
}

#[test]
fn what_is_sent_and_received_is_seen_when_it_is_there() {
    let gpu = Standin::new(Api::Cuda).open();
    let stream = gpu.stream().unwrap();
    let mut buffer = gpu.alloc_zeroed::<i32>(3).unwrap();
    let mut outbox = Outbox::<i32>::new(&gpu, 4).unwrap();
    let mut inbox = Inbox::<i32>::new(&gpu, 3).unwrap();
    for round in 0..3 {
        outbox.fill().unwrap().copy_from_slice(&[round, 5, 6, 7]);
        outbox.send(&stream, 0, buffer.slice_mut(..1)).unwrap();
        outbox.send(&stream, 2, buffer.slice_mut(1..)).unwrap();
        inbox.receive(&stream, &buffer).unwrap();
        assert_eq!(inbox.read().unwrap(), [round, 6, 7]);
    }
    outbox.send(&stream, 2, &mut buffer).unwrap_err();
    inbox.receive(&stream, &gpu.alloc_zeroed::<i32>(4).unwrap()).unwrap_err();
    let in_capture = stream.capture(|stream| outbox.send(stream, 0, buffer.slice_mut(..1)));
    assert!(in_capture.unwrap_err().to_string().contains("sending"));
}
